"""Hugging Face checkpoints in and out."""

from kdjax.checkpoint.drafter import Drafter as Drafter
from kdjax.checkpoint.drafter import load_drafter as load_drafter
from kdjax.checkpoint.drafter import save_drafter as save_drafter
from kdjax.checkpoint.files import sha256 as sha256
from kdjax.checkpoint.hf_config import read_drafter_config as read_drafter_config
from kdjax.checkpoint.hf_config import read_model_config as read_model_config
from kdjax.checkpoint.hf_config import write_drafter_config as write_drafter_config
from kdjax.checkpoint.hf_config import write_model_config as write_model_config
from kdjax.checkpoint.progress import Monitor as Monitor
from kdjax.checkpoint.target import Target as Target
from kdjax.checkpoint.target import load_target as load_target
from kdjax.checkpoint.target import save_target as save_target
