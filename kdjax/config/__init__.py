"""Frozen, typed configurations."""

from kdjax.config.model import DrafterConfig as DrafterConfig
from kdjax.config.model import Int4Config as Int4Config
from kdjax.config.model import ModelConfig as ModelConfig
from kdjax.config.model import YarnConfig as YarnConfig
