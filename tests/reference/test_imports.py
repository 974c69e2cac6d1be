import subprocess
import sys


def test_the_reference_imports_no_jax():
    program = (
        "import importlib, pkgutil, sys, kdjax.reference as r\n"
        "names = [m.name for m in pkgutil.iter_modules(r.__path__)]\n"
        "assert 'tree' in names\n"
        "for name in names: importlib.import_module(f'kdjax.reference.{name}')\n"
        "loaded = {m.split('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'flax'}\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
