"""Model and data of {{ cookiecutter.project_name }}; `experiments/*.yaml` put them together."""
