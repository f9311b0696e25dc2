"""What every room needs and no room owns: files, processes, progress, statistics, plots."""
