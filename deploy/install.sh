#!/usr/bin/env bash
# Installs Bottega's services on this machine for systemd, upgrades them, goes back, and removes them. See --help.
#
# Each release is a virtual environment of its own below /opt/bottega/releases, with the units that belong to it;
# /opt/bottega/current is a link to one of them. A release is complete and has been tried before the link moves, and what
# runs stays in the release in which it began until it is restarted. Configurations and state belong to no release.
set -euo pipefail
# Services are users of their own and read releases and configurations, whatever root's files are otherwise.
umask 022

usage() {
	cat <<'TEXT'
Usage: deploy/install.sh COMMAND [OPTION...]     as root, from a checkout

  install            this checkout's release; run again, it upgrades, or finds that nothing is to be done
  rollback           the release before the current one; again, the one after it
  status             which releases there are, and which one is current
  uninstall          units, releases and links; configurations and state stay, without --purge

  --services LIST    what this machine runs, by commas: activations,cache,controlnet,gateway,loras,worker (all)
  --kernels          Triton kernels too, for a machine with a CUDA device; --no-kernels takes them out again
  --with PACKAGE     one that is installed too, as pip takes it: a requirement, a folder, a wheel; may be repeated
  --without PACKAGE  takes out what --with has put in, as status lists it
  --python PATH      the Python 3.11 to 3.13 that releases are made with (python3.11, else python3)
  --root FOLDER      installs below it instead of /, and asks no running systemd for anything
  --no-restart       leaves services that run in the release that they run in
  --keep N           releases that stay (3), and each that a process still runs in
  --purge            of uninstall: removes /etc/bottega, and all jobs, pictures, LoRAs and records, too

What these four said counts for later releases, too, until they say something else; status lists it.

pip's own settings apply, as PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu where there is no GPU.
TEXT
}

fail() {
	echo "install.sh: $1" >&2
	exit "${2:-1}"
}

# pip takes paths from where it is called, and the next upgrade may be called from elsewhere.
absolute() {
	case $1 in
	-*) fail "--with $1: options of pip's are settings of pip's own" 2 ;;
	*/* | *.whl) realpath -es "$1" 2>/dev/null || echo "$1" ;;
	*) echo "$1" ;;
	esac
}

all_services=activations,cache,controlnet,gateway,loras,worker
source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command=${1:-}
[ $# -gt 0 ] && shift
root=/ services= kernels= with=() without=() python= restart=yes keep=3 purge=
while [ $# -gt 0 ]; do
	case $1 in
	--services | --with | --without | --python | --root | --keep)
		[ $# -gt 1 ] || fail "$1 needs a value" 2
		case $1 in
		--services) services=$2 ;;
		--with) with+=("$(absolute "$2")") ;;
		--without) without+=("$(absolute "$2")") ;;
		--python) python=$2 ;;
		--root) root=$2 ;;
		--keep) keep=$2 ;;
		esac
		shift
		;;
	--kernels) kernels=yes ;;
	--no-kernels) kernels=no ;;
	--no-restart) restart= ;;
	--purge) purge=yes ;;
	-h | --help) usage && exit 0 ;;
	*) fail "there is no option $1; see --help" 2 ;;
	esac
	shift
done
[[ $keep =~ ^[1-9][0-9]*$ ]] || fail "--keep is $keep; a number of releases, at least 1" 2
case $command in
install) mkdir -p "$root" 2>/dev/null || fail "the folder $root cannot be made" 2 ;;
rollback | status | uninstall) [ -d "$root" ] || fail "there is no folder $root" 2 ;;
-h | --help) usage && exit 0 ;;
"") usage >&2 && exit 2 ;;
*) fail "there is no command $command; see --help" 2 ;;
esac
root=$(cd "$root" && pwd)
root=${root%/}
[ "$command" = status ] || [ -n "$root" ] || [ "$(id -u)" = 0 ] ||
	fail "only root may change what is below /: sudo deploy/install.sh $command, or --root FOLDER of a folder of your own" 2

home=$root/opt/bottega
releases=$home/releases
etc=$root/etc/bottega
units=$root/etc/systemd/system
sysusers=$root/usr/lib/sysusers.d
bin=$root/usr/local/bin
state=$root/var/lib

# Where there is a root folder, systemd's files are worked on, and nothing is asked of a systemd that runs. The variable
# is for tests, which have a systemctl of their own.
offline() { [ -z "${BOTTEGA_TEST_SYSTEMD:-}" ] && { [ -n "$root" ] || [ ! -d /run/systemd/system ]; }; }
has_sysusers() { command -v systemd-sysusers >/dev/null; }
has_releases() { [ -n "$(ls "$releases" 2>/dev/null)" ]; }
link_of() { [ -L "$home/$1" ] && basename "$(readlink "$home/$1")" || true; }

# A link that is one or the other at every moment.
point() {
	ln -sfn "releases/$2" "$home/.$1.new"
	mv -T "$home/.$1.new" "$home/$1"
}

# What was chosen for the current release counts where nothing else is said now. It lies in the release, so that the way
# back leads to what was chosen before, too.
read_choices() {
	local file=$home/current/share/choices name value package known kept=()
	[ -e "$file" ] || file=/dev/null
	while read -r name value; do
		case $name in
		services) services=${services:-$value} ;;
		kernels) kernels=${kernels:-$value} ;;
		with) kept+=("$value") ;;
		esac
	done <"$file"
	services=${services:-all} kernels=${kernels:-no}
	[[ $services =~ ^(all|(${all_services//,/|})(,(${all_services//,/|}))*)$ ]] ||
		fail "--services is $services; all, or some of $all_services" 2
	# Of the release before, too: an install that moved the link and then failed is run again as it was.
	known=$(printf 'with %s\n' "${kept[@]}"; cat "$home/previous/share/choices" 2>/dev/null || true)
	for package in "${without[@]}"; do
		grep -qxF -- "with $package" <<<"$known" || fail "--without $package: --with has not put that in" 2
	done
	mapfile -t with < <(printf '%s\n' "${kept[@]}" "${with[@]}" |
		grep -vxFf <(printf '%s\n' "${without[@]}") | awk '!seen[$0]++')
}

choices() {
	printf '%s\n' "services $services" "kernels $kernels"
	[ ${#with[@]} = 0 ] || printf 'with %s\n' "${with[@]}"
}

# Of all files there but those that builds leave behind.
sums_of() {
	find "$@" -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' -not -path '*/build/*' -not -path '*/.git/*' \
		-not -name '*_pb2*' -print0 | LC_ALL=C sort -z | xargs -0r sha256sum
}

# Of packages that lie on this machine; the others are what their requirement says.
sums_of_packages() {
	local package
	for package in "${with[@]}"; do
		if [[ $package = /* && -d $package ]]; then
			(cd "$package" && sums_of .)
		elif [[ $package = /* && -f $package ]]; then
			sha256sum "$package"
		fi
	done
}

# The same sources are the same release, whatever they are called.
release_name() {
	local sum
	sum=$(cd "$source_folder" && {
		choices
		sums_of_packages
		sed -n 's/^version = //p' services/pyproject.toml
		sums_of protos libs services kernels deploy constraints.txt
	} | sha256sum | cut -c1-12)
	echo "$(sed -n 's/^version = "\(.*\)"/\1/p' "$source_folder/services/pyproject.toml")-$sum"
}

find_python() {
	python=${python:-$(command -v python3.11 || command -v python3 || true)}
	[ -n "$python" ] && "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
		fail "Python 3.11 to 3.13 with venv is needed (Debian: apt install python3-venv); say where it is with --python PATH" 2
	check_python_is_for_all
}

# A release starts the interpreter that its environment was made with, and so does every service, as a user of its own.
# Whoever is not root installs for themselves alone, and below a root folder services may all be of one user.
check_python_is_for_all() {
	local program what
	[ "$(id -u)" = 0 ] || return 0
	program=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
	"$python" - "$program" <<-'PYTHON' && return
		import subprocess, sys
		program = [sys.argv[1], "-I", "-c", "import ctypes, ssl, venv"]
		nobody = {"user": 65534, "group": 65534, "extra_groups": []}
		try:
		    done = subprocess.run(program, cwd="/", stderr=subprocess.DEVNULL, check=False, **nobody)
		except OSError:
		    sys.exit(1)
		sys.exit(done.returncode != 0)
	PYTHON
	what="other users cannot execute $program, and units are such users"
	offline && [ -n "$root" ] && echo "note: $what" && return
	fail "$what: name a Python outside of homes with --python PATH" 2
}

# A release is made at its final place, as scripts in it name that; without the mark it is no release.
build() {
	local release=$releases/$1 made packages
	[ -e "$release/.complete" ] && return
	find_python
	rm -rf "$release"
	made=$(mktemp -d)
	trap 'rm -rf "$made" "$release"' EXIT
	# pip builds where the sources lie: not in somebody's checkout, which may have remains of other builds.
	(cd "$source_folder" && tar -c --exclude=__pycache__ --exclude='*.egg-info' --exclude=build --exclude='*_pb2*' protos libs services kernels) |
		tar -x -C "$made"
	echo "making release $1 (torch, where it is needed, is a large download)"
	"$python" -m venv "$release"
	# Where libs stand without an extra, too, pip knows them by their name, as in --with 'bottega-libs[otel]'.
	packages=("$made/protos" "$made/libs" "$made/libs[client]" "$made/libs/weights" "$made/services[${services/#all/$all_services},sandbox]")
	[ "$kernels" = no ] || packages+=("$made/kernels")
	"$release/bin/python" -m pip install --quiet --disable-pip-version-check -c "$source_folder/constraints.txt" \
		"${packages[@]}" "${with[@]}" ||
		fail "pip could not install the release; what runs was not touched"
	mkdir -p "$release/share"
	cp -R "$source_folder/deploy/systemd" "$source_folder/deploy/sysusers" "$source_folder/deploy/config" \
		"$source_folder/deploy/run" "$release/share/"
	choices >"$release/share/choices"
	"$release/bin/bottega" --version >/dev/null || fail "the release does not start; what runs was not touched"
	touch "$release/.complete"
	trap - EXIT
	rm -rf "$made"
}

# New ones are written; what somebody has changed is theirs.
write_configurations() {
	local file
	while IFS= read -r file; do
		[ -e "$etc/$file" ] || install -D -m 644 "$1/share/config/$file" "$etc/$file"
	done < <(cd "$1/share/config" && find . -name '*.yaml' -printf '%P\n')
}

# What the new release cannot read would keep services from starting, one after the other. Those of services that are
# none of Bottega's are not its matter.
check_configurations() {
	local files
	mapfile -d '' files < <(cd "$1/share/config" && find . -name '*.yaml' -printf '%h\n' | sort -u | while IFS= read -r folder; do
		find "$etc/$folder" -maxdepth 1 -name '*.yaml' -print0
	done)
	local ours=() file
	for file in "${files[@]}"; do
		[ "$(dirname "$file")" != "$etc/." ] || [ -e "$1/share/config/$(basename "$file")" ] || continue
		ours+=("$file")
	done
	# Services that run have their ports, and not all that have a configuration are for this machine.
	BOTTEGA_CHECK_PORTS=no "$1/bin/bottega" config check "${ours[@]}" >/dev/null ||
		fail "configurations that this release cannot use (above): mend them, and run it again; nothing was switched"
}

# Instances of a template are of its unit, which ends in @.service.
instances_of() { echo "${1/%@.service/@*.service}"; }

stop_units() {
	offline && return
	local unit list
	list=$(systemctl list-units --full --plain --no-legend "$@" | awk '{ print $1 }')
	for unit in $list; do
		systemctl stop "$unit"
		# A failed one would still be listed, and be restarted, when its file is gone.
		systemctl reset-failed "$unit" 2>/dev/null || true
	done
}

# Units that the release $1 brought along and $2 does not have. What else is in that folder is others'.
remove_dropped_units() {
	local unit
	for unit in $(ls "$releases/$1/share/systemd"); do
		[ ! -e "$releases/$2/share/systemd/$unit" ] || continue
		[ -z "$restart" ] || stop_units "$(instances_of "$unit")"
		remove_unit "$unit"
	done
}

# With the links by which it and its instances were enabled.
remove_unit() {
	rm -f "$units/$1"
	find "$units" -mindepth 2 -type l -name "$(instances_of "$1")" -delete
}

# Units that releases brought along.
remove_units() {
	local unit
	[ -d "$units" ] || return 0
	for unit in "$releases"/*/share/systemd/*; do
		[ -e "$unit" ] || continue
		remove_unit "$(basename "$unit")"
	done
	find "$units" -depth -type d -name '*bottega*' -empty -delete
}

# Before configurations are checked, which is also whether the units' groups may read what these name.
make_groups() {
	install -D -m 644 -t "$sysusers" "$1"/share/sysusers/*
	# Below a root folder, as in a container, services may all be of one user, who needs no group for links or tenants.
	! has_sysusers || systemd-sysusers ${root:+--root="$root"} bottega.conf
}

write_units() {
	install -D -m 644 -t "$units" "$1"/share/systemd/*
	install -D -m 755 "$1/share/run" "$home/run"
	mkdir -p "$bin"
	ln -sfn "$home/current/bin/bottega" "$bin/bottega"
}

# What runs, starts, or has failed in the release before, which the next one may mend. The gateway last: its jobs are on
# its disk, and workers finish what they draw before they end.
services_to_restart() {
	systemctl list-units --full --plain --no-legend --state=active,activating,reloading,failed 'bottega-*.service' |
		awk '$1 == "bottega-gateway.service" { gateway = $1; next } { print $1 } END { if (gateway) print gateway }'
}

# An upgrade ends at the first service that ran and does not start again: the others go on as they are. The way back
# leaves none out.
restart_services() {
	offline && return
	systemctl daemon-reload
	[ -n "$restart" ] || return 0
	local unit list ran failed= way_back=
	list=$(services_to_restart)
	for unit in $list; do
		echo "restarting $unit"
		systemctl is-active --quiet "$unit" && ran=yes || ran=
		# One that failed often is refused for a while where its unit has a limit of starts.
		systemctl reset-failed "$unit" 2>/dev/null || true
		systemctl restart "$unit" && continue
		failed="$failed $unit"
		echo "$unit does not start; why: systemctl status $unit; journalctl -u $unit" >&2
		if [ "$command" = install ] && [ -n "$ran" ]; then break; fi
	done
	[ "$command" = rollback ] || way_back="; back: deploy/install.sh rollback"
	[ -z "$failed" ] || fail "release $(link_of current) is current, but did not start:$failed$way_back"
}

switch_to() {
	local from
	from=$(link_of current)
	[ -z "$from" ] || remove_dropped_units "$from" "$1"
	write_units "$releases/$1"
	if [ "$from" != "$1" ]; then
		[ -z "$from" ] || point previous "$from"
		point current "$1"
	fi
	restart_services
	echo "release $1 is current${from:+; before: $from}"
}

# Of processes that were started from a release, or have a file of it mapped, as its Python or a library. The pattern
# comes by stdin, so that grep does not find itself.
processes_of() {
	local path
	path=$(cd "$releases/$1" && pwd -P)/
	grep -lsF -f - /proc/[0-9]*/{cmdline,maps} <<<"$path" | cut -d/ -f3 | sort -nu | xargs || true
}

# A service imports and starts processes of its release for as long as it runs.
remove_old() {
	local release running
	for release in $(ls -1t "$releases" | tail -n "+$((keep + 1))"); do
		case $release in "$(link_of current)" | "$(link_of previous)") continue ;; esac
		running=$(processes_of "$release")
		if [ -n "$running" ]; then
			echo "release $release stays for what still runs in it (process ${running// /, })"
			continue
		fi
		echo "removing release $release"
		rm -rf "${releases:?}/$release"
	done
}

# The folder itself is what is locked: a file in it might be a link, and opening that to write would empty what it names.
lock() {
	install -d -m 755 "$home" "$releases"
	exec 9<"$home"
	flock -n 9 || fail "another install.sh runs here"
}

say_what_is_next() {
	if offline; then
		cat <<-TEXT
			No systemd was asked to start anything. By hand, each in a terminal of its own; "Without systemd" in deploy/README.md has all:
			  BOTTEGA_STATE=$state/bottega-gateway $home/run bottega.gateway --config $etc/gateway.yaml
			  BOTTEGA_STATE=$state/bottega-worker/miniature $home/run bottega.worker --config $etc/workers/miniature.yaml
			  $bin/bottega doctor
		TEXT
	else
		cat <<-'TEXT'
			Next, on a machine with a gateway and a worker of the embedded model:
			  systemctl enable --now bottega.target bottega-gateway bottega-worker@miniature
			  bottega doctor
		TEXT
	fi
}

remains() { ls -d "$etc" "$state"/bottega-* "$state"/private/bottega-* 2>/dev/null || true; }

case $command in
install)
	has_sysusers || [ -n "$root" ] ||
		fail "systemd-sysusers is needed, which makes the group of the links (Debian: apt install systemd); without systemd: --root FOLDER" 2
	read_choices
	lock
	release=$(release_name)
	was=$(link_of current)
	build "$release"
	write_configurations "$releases/$release"
	make_groups "$releases/$release"
	check_configurations "$releases/$release"
	switch_to "$release"
	remove_old
	[ -n "$was" ] || say_what_is_next
	;;
rollback)
	has_releases || fail "nothing is installed below ${root:-/}"
	lock
	before=$(link_of previous)
	[ -n "$before" ] && [ -e "$releases/$before/.complete" ] || fail "there is no release to go back to"
	make_groups "$releases/$before"
	check_configurations "$releases/$before"
	switch_to "$before"
	;;
status)
	has_releases || fail "nothing is installed below ${root:-/}"
	for release in $(ls -1 "$releases"); do
		mark=
		[ "$release" = "$(link_of current)" ] && mark=" (current)"
		[ "$release" = "$(link_of previous)" ] && mark=" (before it)"
		[ -e "$releases/$release/.complete" ] || mark=" (not complete)"
		echo "$release$mark"
	done
	read_choices
	choices
	echo "this checkout, with these choices, is $(release_name)"
	;;
uninstall)
	has_releases || [ -e "$home" ] || [ -n "$(remains)" ] || fail "nothing is installed below ${root:-/}"
	lock
	stop_units 'bottega-*.service' 'bottega.*'
	remove_units
	rm -f "$sysusers/bottega.conf" "$bin/bottega"
	rm -rf "$releases" "$home/current" "$home/previous" "$home/run"
	rmdir --ignore-fail-on-non-empty "$home"
	if [ -n "$purge" ]; then
		rm -rf "$etc" "$state"/bottega-* "$state"/private/bottega-* "$root"/var/cache/bottega-* "$root"/var/cache/private/bottega-*
	elif [ -n "$(remains)" ]; then
		echo "configurations and state are still there; --purge removes them:" $(remains)
	fi
	offline || systemctl daemon-reload
	;;
esac
