"""How XLA compiles in tests: nearly all of their time is compilation of programs that run once."""

from importlib.metadata import version


def flags(devices: int) -> str:
    """XLA_FLAGS for that many CPU devices."""
    found = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):
        # compiles in less than half of the time; jaxlib 0.11 has no other way and ends at a flag that it does not know
        found += " --xla_cpu_use_fusion_emitters=false"
    return found
