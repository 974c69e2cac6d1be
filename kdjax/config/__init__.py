"""Frozen, typed configurations."""

from kdjax.config.decode import DecodeConfig as DecodeConfig
from kdjax.config.decode import Sampling as Sampling
from kdjax.config.generate import GenerateConfig as GenerateConfig
from kdjax.config.mesh import ONE_DEVICE as ONE_DEVICE
from kdjax.config.mesh import Cluster as Cluster
from kdjax.config.mesh import DeviceConfig as DeviceConfig
from kdjax.config.mesh import MeshConfig as MeshConfig
from kdjax.config.model import DrafterConfig as DrafterConfig
from kdjax.config.model import DrafterOverrides as DrafterOverrides
from kdjax.config.model import Int4Config as Int4Config
from kdjax.config.model import ModelConfig as ModelConfig
from kdjax.config.model import YarnConfig as YarnConfig
from kdjax.config.pair import ModelPair as ModelPair
from kdjax.config.pair import check_pair as check_pair
from kdjax.config.strict import dumps as dumps
from kdjax.config.strict import load as load
