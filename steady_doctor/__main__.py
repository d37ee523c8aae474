"""Runs any training script and says what is wrong with its updates.

    python -m steady_doctor my_train.py --its_flags ...
    python -m steady_doctor --watch_updates 50 --fail_on critical my_train.py --its_flags ...

Exit status: that of the script. With --fail_on, a script that ends with 0 gets 1 for findings, and 2 if nothing was judged.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m steady_doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--watch_dir", type=Path, help="folder for the report and the findings (watch/<the script's name>)")
    parser.add_argument("--watch_updates", type=int, help="stop the script after this many updates")
    parser.add_argument(
        "--fail_on", choices=("critical", "warning"), help="exit status 1 for findings of this severity or above"
    )
    parser.add_argument("--all", action="store_true", help="print the figures of each recorded update, too")
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="all that follows is for the script")
    args = parser.parse_args()
    if args.watch_updates is not None and args.watch_updates < 1:
        parser.error(f"--watch_updates {args.watch_updates}: at least 1")
    from steady_doctor.run import watch_script  # torch takes seconds, which --help and a mistyped flag should not pay for

    return watch_script(
        args.script,
        args.arguments,
        args.watch_dir,
        most_updates=args.watch_updates,
        shows_all=args.all,
        fail_on=args.fail_on,
    )


if __name__ == "__main__":
    sys.exit(main())
