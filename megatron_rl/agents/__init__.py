"""The door for agents: three chat protocols over the rows of a run, whose tokens are exactly those that were sampled."""
