"""Memory and time of decoding on a mesh, worked out without its devices."""

from kdjax.plan.compiled import Compiled as Compiled
from kdjax.plan.compiled import compile_step as compile_step
from kdjax.plan.memory import Workload as Workload
from kdjax.plan.memory import memory as memory
from kdjax.plan.plan import Plan as Plan
from kdjax.plan.plan import plan as plan
from kdjax.plan.step import step as step
