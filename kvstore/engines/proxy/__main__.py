"""`python -m kvstore.engines.proxy`."""

from .runner import main

main()
