"""Parts of the Ray launcher. Nothing is imported here: workers load `work` first, and should load no more then."""
