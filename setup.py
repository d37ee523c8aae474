"""What pyproject.toml cannot say of `pip install .`: the requirements are those of requirements.txt up to its development part,
the scripts with their packages go into one package, so that names such as `utils` clash with nobody's, and the doctor of any
script is a package of its own."""

from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

lines = Path("requirements.txt").read_text().split("\n# Development")[0].splitlines()
doctor = find_packages(include=["steady_doctor", "steady_doctor.*"])
inside = find_namespace_packages(include=["models", "utils", "utils.*"])
setup(
    install_requires=[words for line in lines if (words := line.split("#")[0].strip())],
    packages=["steady_diffusion", *(f"steady_diffusion.{name}" for name in inside), *doctor],
    package_dir={"steady_diffusion": "."},
    package_data={
        "steady_diffusion.utils.diagnostics": ["*.toml"],
        "steady_diffusion.utils.diagnostics.report": ["*.css", "*.js", "*.html"],
        "steady_doctor": ["*.toml", "*.html"],
    },
)
