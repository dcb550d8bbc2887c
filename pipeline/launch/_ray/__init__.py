"""Parts of the Ray launcher. This file imports nothing: workers load `work` first, and should load no more then."""
