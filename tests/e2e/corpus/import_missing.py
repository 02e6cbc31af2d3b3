# headline: rank 0 .* raised ModuleNotFoundError: No module named 'cv2'
# next: install opencv-python .*pip install opencv-python
# not: restart 1

import cv2
