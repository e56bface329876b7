"""What looks at a run from outside: costs, simulation, plans, doctor, report, watch. Training imports none of it."""
