"""What mkdocs.yml can't say: files outside of docs/ that pages link to, which the search leaves out.

Links such as ../benchmarks/results/speedup.json work as they are on the disk and where repositories are browsed; in the
site those files are in repository/.
"""

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
_RELATIVE = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Leave files outside of docs/ out of the search, and make their links work."""
    if not page.file.src_uri.startswith("../"):
        return markdown
    page.meta["search"] = {"exclude": True}
    return _RELATIVE.sub(lambda link: _link_from_outside(link, page=page.file, files=files), markdown)


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


def _link_from_outside(link: re.Match[str], *, page: File, files: Files) -> str:
    """Return a link of a file outside of docs/, as HTML that mkdocs doesn't resolve; without its target, its text."""
    text, path, anchor = link.groups(default="")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), path))
    file = files.src_uris.get(target.removeprefix("../docs/"))
    return f'<a href="{file.url_relative_to(page)}{anchor}">{text}</a>' if file else text
