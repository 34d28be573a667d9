import sys


def main() -> int:
    try:
        from fasth.reproduce.study import command
    except ModuleNotFoundError as error:
        print(f"The study needs {error.name}, which comes with: pip install 'fasth[study]'", file=sys.stderr)
        return 2
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
