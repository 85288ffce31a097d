# A peer in a container. With CUDA:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --tag barnraise .
FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential libgmp-dev
COPY . /source
RUN python -m venv /opt/barnraise \
    && /opt/barnraise/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
       --constraint /source/constraints.txt '/source[all]'

FROM python:3.11-slim-bookworm
# torch.compile wants a compiler, fastecdsa the library libgmp
RUN apt-get update && apt-get install --yes --no-install-recommends libgmp10 g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/barnraise /opt/barnraise
RUN useradd --create-home barnraise && install -d -o barnraise /home/barnraise/.barnraise
USER barnraise
WORKDIR /home/barnraise
# The homes of peers: their keys and checkpoints.
VOLUME /home/barnraise/.barnraise
EXPOSE 4001
ENTRYPOINT ["/opt/barnraise/bin/peer"]
CMD ["--help"]
