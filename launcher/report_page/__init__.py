"""`elaunch report`: makes one page from what a run left in its log folder."""
