"""The mesh, and one table that says how every array is split over it."""

from kdjax.sharding.mesh import alone as alone
from kdjax.sharding.mesh import make_mesh as make_mesh
from kdjax.sharding.processes import joined as joined
from kdjax.sharding.rules import Rule as Rule
from kdjax.sharding.rules import Split as Split
from kdjax.sharding.rules import partition as partition
from kdjax.sharding.rules import place as place
from kdjax.sharding.rules import shardings as shardings
from kdjax.sharding.rules import share as share
from kdjax.sharding.table import draft_cache_rules as draft_cache_rules
from kdjax.sharding.table import drafter_rules as drafter_rules
from kdjax.sharding.table import drafter_specs as drafter_specs
from kdjax.sharding.table import kv_cache_rules as kv_cache_rules
from kdjax.sharding.table import target_rules as target_rules
from kdjax.sharding.table import target_shardings as target_shardings
from kdjax.sharding.table import target_specs as target_specs
