"""Memory and time of decoding on a mesh, worked out without its devices."""

from kdjax.plan.memory import Workload as Workload
from kdjax.plan.memory import memory as memory
from kdjax.plan.plan import Plan as Plan
from kdjax.plan.plan import plan as plan
from kdjax.plan.step import step as step
