"""The `tokenyard` command. Needs the `cli` extra: typer, rich, matplotlib and safetensors."""
