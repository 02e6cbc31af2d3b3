"""`elaunch submit`: a job for a scheduler, written and handed in."""
