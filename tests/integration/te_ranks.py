"""``python -m tests.integration.te_ranks FOLDER NUM_RANKS MODULE ARGUMENT...``: ``forked_ranks`` with Transformer Engine.

FOLDER holds the unpacked wheel; see ``te_stand_ins.py``.
"""

import sys
from pathlib import Path

from tests import te_stand_ins

if __name__ == "__main__":
    te_stand_ins.install(Path(sys.argv[1]))
    from tests.integration import forked_ranks

    te_stand_ins.let_models_use_it()
    sys.exit(forked_ranks.main(int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
