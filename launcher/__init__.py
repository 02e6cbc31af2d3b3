"""The command line: argv to Options to JobSpec; exit code; report."""
