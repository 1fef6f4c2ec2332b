"""What `import fleetplan` offers, and what commands and pages call: files or objects in, results out."""
