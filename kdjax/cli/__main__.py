import sys

from kdjax.cli import main

sys.exit(main())
