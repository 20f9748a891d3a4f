"""What `scripts/sweep.py` is made of: a zoo for each library, the trial of one model, the results and their page."""
