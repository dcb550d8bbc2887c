"""Takes into the site what pages link to outside of docs/, such as ../benchmarks/results/speedup.json.

Those links work as they are on the disk and where repositories are browsed; in the site the files are in repository/.
"""

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


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
