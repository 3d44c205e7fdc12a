"""What the site has beside the pages of docs/: notebooks, the Python reference, linked sources, and llms.txt.

mkdocs calls the functions by their names; `mkdocs.yml` names this file. A page that would load a script, a font or a
picture from the network fails the strict build.
"""

import logging
import posixpath
import re
import shutil
from pathlib import Path

import llms
import notebook_pages
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("mkdocs.hooks.docs_site")
UPWARDS = re.compile(r"\]\((\.\./[\w./-]+)(?:#[\w-]+)?\)")  # a link that leaves the page's directory, and perhaps docs/
NETWORK = r"[\"']?(?:https?:)?//"
LOADED = re.compile(  # a link of the page to itself, rel=canonical, loads nothing
    rf"<(?:script|img|iframe|source)\b[^>]*\bsrc={NETWORK}|<link\b[^>]*\brel=[\"']?(?!canonical)\w+[^>]*\bhref={NETWORK}"
)


class NotebookFile(File):
    """A notebook that is a page of the site."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the anchors of headings those of code hosts, so that a link is right in both places."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = NotebookFile.generated(config, file.src_uri, content=notebook_pages.as_markdown(Path(file.abs_src_path)))
        files.append(page)
    for name, module in reference.PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=reference.page_text(module)))
    for path in sorted(linked_sources(files)):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    return files


def linked_sources(files: Files) -> set[str]:
    """Return the files outside docs/ that pages link to, as paths from the root of the repository."""
    pages = [file for file in files.documentation_pages() if not is_made(file)]
    found = (outside(link, file) for file in pages for link in UPWARDS.findall(file.content_string))
    return {path for path in found if path}


def is_made(file: File) -> bool:
    return file.src_uri.startswith(("source/", "reference/"))


def outside(link: str, file: File) -> str:
    """Return the path of a linked file from the root of the repository; nothing for one in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), link))
    return "" if path.startswith("docs/") else path


def source_page(path: str) -> str:
    """Return a page that shows a file; fails the strict build if there is none."""
    file = ROOT / path
    if not file.is_file():
        LOG.warning("a page links to %s, which is no file", path)
        return f"# {path}\n"
    language = {".py": "python", ".sh": "bash", ".md": "markdown", ".yml": "yaml"}.get(file.suffix, "text")
    return (
        f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n{file.read_text(encoding='utf-8')}\n````\n"
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into links to the pages that show them."""
    if is_made(page.file):
        return markdown

    def shown(match: re.Match) -> str:
        path = outside(match[1], page.file)
        return (
            f"]({posixpath.relpath(f'source/{path}.md', posixpath.dirname(page.file.src_uri))})" if path else match[0]
        )

    return UPWARDS.sub(shown, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Fail the strict build if a page loads something from the network."""
    for match in LOADED.finditer(output):
        LOG.warning("%s loads from the network: %s", page.file.src_uri, match[0])
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Write what machines read: llms.txt, and beside each page its Markdown; and the index for pages from the disk."""
    site = Path(config.site_dir)
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")  # pages from the disk
    (site / "llms.txt").write_text(llms.text(prefix=""), encoding="utf-8")
    for source in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]:
        shutil.copy(source, site / source.relative_to(ROOT / "docs"))
