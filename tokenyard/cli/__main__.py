"""python -m tokenyard.cli"""

from tokenyard.cli import main

main()
