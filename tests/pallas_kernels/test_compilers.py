"""Programs that other processes compile."""

from __future__ import annotations

import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.compilers import CompileError, Compilers

# in the other processes, which import this module


def compile_power(exponent: int) -> jax.stages.Compiled:
    return jax.jit(lambda shared, x: shared["w"] * x**exponent).lower({"w": jnp.float32(2)}, jnp.ones(3)).compile()


def fail() -> jax.stages.Compiled:
    raise ValueError("too much shared memory")


def crash() -> jax.stages.Compiled:
    os._exit(7)


def hang() -> jax.stages.Compiled:
    time.sleep(600)
    raise AssertionError


def results(compilers: Compilers, count: int) -> dict:
    found = {}
    while len(found) < count:
        found |= dict(compilers.finished(60.0))
    return found


def test_jobs_come_back_as_programs_or_as_errors_and_none_takes_another_along():
    with Compilers(2) as compilers:
        compilers.start("cube", functools.partial(compile_power, 3))
        compilers.start("fail", fail)
        assert compilers.idle == 0 and not list(compilers.finished(0.0))
        found = results(compilers, 2)
        np.testing.assert_array_equal(found["cube"]({"w": jnp.float32(2)}, jnp.full(3, 2.0)), 16.0)
        assert isinstance(found["fail"], CompileError) and str(found["fail"]) == "ValueError: too much shared memory"

        compilers.start("crash", crash)
        compilers.start("square", functools.partial(compile_power, 2))
        found = results(compilers, 2)
        assert str(found["crash"]) == "the compiler ended with exit code 7"
        np.testing.assert_array_equal(found["square"]({"w": jnp.float32(1)}, jnp.full(3, 3.0)), 9.0)

        compilers._longest = 0.1
        compilers.start("hang", hang)
        assert compilers.idle == 1
        found = results(compilers, 1)
        assert str(found["hang"]) == "no result after 0 s"
        compilers._longest = 100.0
        for worker in compilers._workers:
            worker.process.kill()  # while it has no job, as where memory is short
            worker.process.join()
        compilers.start("again", functools.partial(compile_power, 1))
        compilers.start("and again", functools.partial(compile_power, 2))
        assert set(results(compilers, 2)) == {"again", "and again"}
