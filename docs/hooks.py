"""What mkdocs.yml can't say: the records of decisions as pages, and files outside of docs/ that pages link to.

Links such as ../benchmarks/results/speedup.json work as they are on the disk and where repositories are browsed; in the
site those files are in repository/.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every record of a decision into the menu: they only ever become more."""
    records = sorted(path.name for path in Path(config.docs_dir, "decisions").glob("[0-9]*.md"))
    (decisions,) = (entry["Decisions"] for entry in config.nav or () if "Decisions" in entry)
    decisions += [f"decisions/{name}" for name in records]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add those files; a link that leads to none is left to mkdocs, which then refuses to build."""
    for page in files.documentation_pages():
        for link in _LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), link))
            if path.startswith("../") and path not in files.src_uris:
                _add(path, files, config)
    return files


def _add(path: str, files: Files, config: MkDocsConfig) -> None:
    inside = "repository/" + path.removeprefix("../")
    file = File(
        path,
        src_dir=config.docs_dir,
        dest_dir=config.site_dir,
        use_directory_urls=config.use_directory_urls,
        dest_uri=re.sub(r"\.md$", ".html", inside),
        inclusion=InclusionLevel.NOT_IN_NAV,
    )
    if file.abs_src_path and not posixpath.isfile(file.abs_src_path):
        return
    files.append(file)
