"""``pretrain_gpt.py`` of the folder this is started in, with the extension installed.

For runners that start a script of their own choice with torchrun and take no module or command in its place.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ckpt_ext.launch import main

if __name__ == "__main__":
    sys.exit(main(["pretrain_gpt.py", *sys.argv[1:]]))
