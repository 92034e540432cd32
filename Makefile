# Everything a contributor needs. `make help` lists the targets; `.ci/run` calls `check` and `test`.

GO    ?= go
TOOL  := $(GO) tool -modfile=.ci/tools.mod
PKGS  ?= ./...
# What is said about other database clients is a module of its own: they are not to be in the product's go.mod.
CLIENTS := cd docs/clients

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## show the promise kept: parcels' scan events, duplicated and killed, each applied once
	@CGO_ENABLED=0 $(GO) run ./examples/parcels

.PHONY: ledger
ledger: backends ## the same on PostgreSQL: money between hot accounts, three processes, killed; LEDGER=-help lists flags
	@CGO_ENABLED=0 $(GO) run ./examples/ledger $(LEDGER)

.PHONY: test
test: need-cc backends ## run all tests under the race detector; at the end: what was skipped, why, and what failed once and passed then
	@mkdir -p out; $(TOOL) gotestsum --format pkgname --packages '$(PKGS)' --rerun-fails=1 --rerun-fails-max-failures=10 \
	  --rerun-fails-abort-on-data-race --rerun-fails-report=out/rerun.txt -- -race -timeout 40m; code=$$?; cat out/rerun.txt 2>/dev/null; \
	  if [ '$(PKGS)' = ./... ]; then $(CLIENTS) && $(GO) test -race . || code=1; cd ../..; fi; \
	  .ci/install-backends --list; exit $$code

.PHONY: backends
backends: ## install the database servers that tests use, where that is allowed; else say how
	@.ci/install-backends

.PHONY: bench
bench: ## compare with plain Watermill and a loop by hand: table, out/bench.json, plots; BENCH=-help lists flags
	@CGO_ENABLED=0 $(GO) run ./contracttest/bench $(BENCH)

.PHONY: crowd
crowd: backends ## eight processes, 100,000 messages, 30 % duplicates, on each server: takes minutes; CROWD=-help lists flags
	@CGO_ENABLED=0 $(GO) run ./contracttest/crowd $(CROWD)

.PHONY: lint
lint: ## golangci-lint with the import rules of .golangci.yml
	$(TOOL) golangci-lint run $(PKGS)
	$(CLIENTS) && $(GO) tool -modfile=../../.ci/tools.mod golangci-lint run -c ../../.golangci.yml ./...

.PHONY: fmt
fmt: ## rewrite all files as the formatters want them
	$(TOOL) golangci-lint fmt

.PHONY: generate
generate: ## write generated files anew
	$(GO) generate ./...

.PHONY: check
check: lint verify-generated verify-mod ## lint, and see that generated files and go.mod are as a new run would write them

.PHONY: verify-generated
verify-generated:
	@.ci/verify-generated

.PHONY: verify-mod
verify-mod:
	$(GO) mod tidy -diff
	$(GO) mod verify
	$(CLIENTS) && $(GO) mod tidy -diff

.PHONY: cover
cover: need-cc backends ## test coverage by package and as out/coverage.html
	@mkdir -p out
	$(TOOL) gotestsum --format pkgname --hide-summary=output -- -race -timeout 40m -coverpkg=./sdk/...,./drivers/...,./middleware/...,./contracttest/... -coverprofile=out/coverage.txt $(PKGS)
	$(GO) tool cover -html=out/coverage.txt -o out/coverage.html
	@$(GO) tool cover -func=out/coverage.txt | tail -1

.PHONY: need-cc
need-cc:
	@command -v "$${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || { \
	  echo 'The race detector needs a C compiler (gcc or clang) and none is on the PATH.'; \
	  echo 'On Debian or Ubuntu: apt-get install gcc libc6-dev'; exit 1; }
