"""`python -m eagle_cli` is `eagle`."""

import sys

from eagle_cli.main import main

sys.exit(main())
