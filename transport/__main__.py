"""`python -m transport`."""

from transport.cli import main

raise SystemExit(main())
