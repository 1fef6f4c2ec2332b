"""One file per command or group of commands: options in, one library call, a short answer out."""
