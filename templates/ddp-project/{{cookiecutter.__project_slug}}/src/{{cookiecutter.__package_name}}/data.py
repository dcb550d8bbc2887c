{% include "data/" ~ cookiecutter.data ~ ".py" -%}
