"""Tools that inspect a run from outside: costs, simulation, plans, doctor, report, watch. Training imports none of them."""
