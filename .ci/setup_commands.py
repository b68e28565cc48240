"""Print a README's set-up commands: the lines of its first `sh` block, comments left out."""

import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
block = re.search(r"```sh\n(.*?)```", text, re.S)
if block is None:
    sys.exit("no ```sh block found")
for line in block.group(1).splitlines():
    if line.strip() and not line.lstrip().startswith("#"):
        sys.stdout.write(line.strip() + "\n")
