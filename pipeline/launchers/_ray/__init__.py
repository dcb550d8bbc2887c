"""Parts of the Ray launcher. Nothing is imported here: Ray's controller loads `work`, and should load no more."""
