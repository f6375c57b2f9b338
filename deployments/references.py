"""A build step of prefect.yaml: the blocks of a deployment, as the UI's run form knows them."""

from typing import Any

from prefect import get_client
from prefect.exceptions import ObjectNotFound

Reference = dict[str, dict[str, Any]]


def look_up(**slugs: str) -> dict[str, Reference]:
    """Each `block-type/document` as a parameter that refers to it.

    By id, because the form shows a reference by slug as nothing chosen. A document that is not there yet is referred to
    by its slug, so it can be made after the deployment.
    """
    return {name: _reference(slug) for name, slug in slugs.items()}


def _reference(slug: str) -> Reference:
    block_type, _, document = slug.partition("/")
    with get_client(sync_client=True) as client:
        try:
            found = client.read_block_document_by_name(document, block_type, include_secrets=False)
        except ObjectNotFound:
            return {"$ref": {"block_document_slug": slug}}
    return {"$ref": {"block_document_id": str(found.id)}}
