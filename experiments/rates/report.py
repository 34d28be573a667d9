def report(options, results, console):
    pass
