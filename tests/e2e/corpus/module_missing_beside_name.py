# A word in a user's own message is no missing module.
# headline: raised RuntimeError: No module named 'cv2' in the registry
# next: none
# slow

raise RuntimeError("No module named 'cv2' in the registry")
