"""Where models and data come from."""

from pathlib import Path
from stat import S_IRWXG, S_IRWXO

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from trainium.errors import UserError


class TokenFileError(UserError):
    """A token file that others can read, or that is not there."""


class HuggingFaceHub(Block):
    """The Hugging Face Hub, or a mirror of it, and the token for gated models."""

    _block_type_name = "Hugging Face Hub"
    _description = "Where base models are downloaded from."

    endpoint: str = Field(description="Address of the hub, usually https://huggingface.co.")
    token: SecretStr | None = Field(default=None, description="Access token, for gated and private models.")
    token_file: Path | None = Field(
        default=None, description="File with the token, readable only by its owner (mode 0600), instead of `token`."
    )

    def read_token(self) -> str | None:
        """The token at the moment of its use. Raises TokenFileError."""
        if self.token_file is None:
            return self.token.get_secret_value() if self.token else None
        path = self.token_file.expanduser()
        try:
            mode = path.stat().st_mode
            text = path.read_text()
        except OSError as error:
            raise TokenFileError(
                f"token_file {path} cannot be read ({error.strerror}). Write the token there."
            ) from error
        if mode & (S_IRWXG | S_IRWXO):
            raise TokenFileError(f"token_file {path} can be read by others. Run: chmod 600 {path}")
        return text.strip() or None


class S3Storage(Block):
    """Amazon S3, or something that speaks its language."""

    _block_type_name = "S3 Storage"
    _description = "Where datasets are downloaded from. Without keys, boto3's own chain of credentials is used."

    region: str = Field(description="Region of the bucket, such as us-east-1.")
    endpoint_url: str | None = Field(default=None, description="Address of the service, if it is not Amazon's.")
    access_key_id: SecretStr | None = Field(default=None, description="Access key.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key.")
    session_token: SecretStr | None = Field(default=None, description="Session token of temporary credentials.")
