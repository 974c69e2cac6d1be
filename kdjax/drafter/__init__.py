"""The DFlash drafter and its context cache."""

from kdjax.drafter.cache import DraftCache as DraftCache
from kdjax.drafter.cache import append as append
from kdjax.drafter.dflash import abstract_params as abstract_params
from kdjax.drafter.dflash import arrange as arrange
from kdjax.drafter.dflash import block_tokens as block_tokens
from kdjax.drafter.dflash import context as context
from kdjax.drafter.dflash import draft as draft
from kdjax.drafter.dflash import features as features
