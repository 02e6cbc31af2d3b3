"""The bundled trainer with the vocabulary of GPT-2: its model then has 124 million parameters, its text stays bytes.

Bytes use 256 of the 50,304 rows; the multiplications are those of all of them.
"""

import sys

from elaunch.trainer.gpt import model

# GPT-2's 50,257, rounded up to a multiple of 64 as in nanoGPT.
model.VOCABULARY = 50304

from elaunch.trainer.__main__ import main  # noqa: E402

sys.exit(main())
