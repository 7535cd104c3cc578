"""Training drafters: texts that the target writes itself, and what every training run shares."""
