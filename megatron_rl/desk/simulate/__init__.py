"""What a run would take: its own stage table on a clock, over lengths and costs that were measured or are assumed."""
