"""`python -m kvstore.engines.proxy` is `kvstore serve`."""

import sys

from .runner import main

sys.exit(main())
