"""Decoding: sampling, the jitted loop, slots for several streams."""

from kdjax.config import DecodeConfig as DecodeConfig
from kdjax.config import Sampling as Sampling
from kdjax.decode.budgeting import CostAware as CostAware
from kdjax.decode.completion import Commit as Commit
from kdjax.decode.completion import Completion as Completion
from kdjax.decode.completion import Statistics as Statistics
from kdjax.decode.completion import Timings as Timings
from kdjax.decode.completion import pool as pool
from kdjax.decode.completion import tau_macro as tau_macro
from kdjax.decode.decoder import Decoder as Decoder
from kdjax.decode.drafting import DFlash as DFlash
from kdjax.decode.drafting import Drafting as Drafting
from kdjax.decode.drafting import Params as Params
from kdjax.decode.engine import Engine as Engine
from kdjax.decode.engine import Stream as Stream
from kdjax.decode.request import Request as Request
