"""hicachectl: the command line. Needs the base install alone; each command group loads when it is chosen."""
