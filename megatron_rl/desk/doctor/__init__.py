"""Is this machine fit for a run, do engines and layouts agree, and why does a run hang?"""
