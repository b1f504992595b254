#!/usr/bin/env bash
# Installs, upgrades, rolls back and removes Bottega's systemd services on this machine. See --help.
#
# Each release is a virtual environment below /opt/bottega/releases, with its units. /opt/bottega/current links to one of
# them. The link moves only to a complete release that has been started once. A running service stays in its release until
# it is restarted. Configurations and state are outside of releases.
set -euo pipefail
# Services run as other users and must be able to read releases and configurations, whatever root's umask is.
umask 022

usage() {
	cat <<'TEXT'
Usage: deploy/install.sh COMMAND [OPTION...]     as root, from a checkout

  install            install or upgrade to this checkout's release
  rollback           switch to the previous release; repeated, switch back again
  status             list the releases, and the options of the current one
  uninstall          remove units, releases and links; configurations and state
                     are kept unless --purge is given

  --services LIST    services of this machine, separated by commas (all):
                     activations,cache,controlnet,gateway,http,loras,worker
  --kernels          install the Triton kernels, for a machine with a CUDA
                     device; --no-kernels removes them again
  --with PACKAGE     install another package (a requirement of pip, a folder or a
                     wheel); may be repeated
  --without PACKAGE  remove a package that --with installed, as status lists it
  --python PATH      Python 3.11 to 3.13 for the release (default: python3.11,
                     else python3)
  --root FOLDER      install below FOLDER instead of / and do not call systemd
  --no-restart       do not restart services: they stay in their release
  --keep N           number of releases to keep (default: 3); releases with
                     running processes are always kept
  --purge            with uninstall: also remove /etc/bottega and all jobs,
                     pictures, LoRAs and records

--services, --kernels, --with and --without are remembered for later releases.

pip's own settings apply, for example on a machine without a GPU
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
TEXT
}

fail() {
	echo "install.sh: $1" >&2
	exit "${2:-1}"
}

# pip resolves paths against the working folder, and the next upgrade may be run from another one.
absolute() {
	case $1 in
	-*) fail "--with $1: not a package; set options of pip in its environment variables" 2 ;;
	*/* | *.whl) realpath -es "$1" 2>/dev/null || echo "$1" ;;
	*) echo "$1" ;;
	esac
}

all_services=activations,cache,controlnet,gateway,http,loras,worker
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
	*) fail "unknown option $1; see --help" 2 ;;
	esac
	shift
done
[[ $keep =~ ^[1-9][0-9]*$ ]] || fail "--keep $keep: must be a number of at least 1" 2
case $command in
install) mkdir -p "$root" 2>/dev/null || fail "cannot create the folder $root" 2 ;;
rollback | status | uninstall) [ -d "$root" ] || fail "there is no folder $root" 2 ;;
-h | --help) usage && exit 0 ;;
"") usage >&2 && exit 2 ;;
*) fail "unknown command $command; see --help" 2 ;;
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

# With --root, only systemd's files are written and systemctl is not called. The variable is for tests, which provide a
# systemctl of their own.
offline() { [ -z "${BOTTEGA_TEST_SYSTEMD:-}" ] && { [ -n "$root" ] || [ ! -d /run/systemd/system ]; }; }
has_sysusers() { command -v systemd-sysusers >/dev/null; }
has_releases() { [ -n "$(ls "$releases" 2>/dev/null)" ]; }
link_of() { [ -L "$home/$1" ] && basename "$(readlink "$home/$1")" || true; }

# Replaces a link in one step, so that it always leads to a release.
point() {
	ln -sfn "releases/$2" "$home/.$1.new"
	mv -T "$home/.$1.new" "$home/$1"
}

# Options that are not given are taken from the current release. They are stored in the release, so that a rollback brings
# back its options too.
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
		fail "--services $services: must be all, or some of $all_services" 2
	# The previous release counts too: an install that failed after moving the link can be repeated with the same options.
	known=$(printf 'with %s\n' "${kept[@]}"; cat "$home/previous/share/choices" 2>/dev/null || true)
	for package in "${without[@]}"; do
		grep -qxF -- "with $package" <<<"$known" || fail "--without $package: was not installed with --with" 2
	done
	mapfile -t with < <(printf '%s\n' "${kept[@]}" "${with[@]}" |
		grep -vxFf <(printf '%s\n' "${without[@]}") | awk '!seen[$0]++')
}

choices() {
	printf '%s\n' "services $services" "kernels $kernels"
	[ ${#with[@]} = 0 ] || printf 'with %s\n' "${with[@]}"
}

# Checksums of all files, without the remains of builds.
sums_of() {
	find "$@" -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' -not -path '*/build/*' -not -path '*/.git/*' \
		-not -name '*_pb2*' -print0 | LC_ALL=C sort -z | xargs -0r sha256sum
}

# Checksums of packages that are files or folders of this machine. Other packages are identified by their requirement.
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

# The name depends on the sources only: the same sources are the same release.
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
		fail "Python 3.11 to 3.13 with venv is needed (Debian: apt install python3-venv); name it with --python PATH" 2
	check_python_is_for_all
}

# Every service starts the interpreter that its environment was made with, as a user of its own. Installations by other
# users than root are not checked, and below --root a failed check is only noted: there all services may have one user.
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
	what="services run as other users, and these cannot execute $program"
	offline && [ -n "$root" ] && echo "note: $what" && return
	fail "$what: name a Python outside of home folders with --python PATH" 2
}

# A release is built at its final path because its scripts contain that path. The file .complete marks a finished one.
build() {
	local release=$releases/$1 made packages
	[ -e "$release/.complete" ] && return
	find_python
	rm -rf "$release"
	made=$(mktemp -d)
	trap 'rm -rf "$made" "$release"' EXIT
	# pip builds in the source folder, so it gets a copy: the checkout may contain remains of other builds.
	(cd "$source_folder" && tar -c --exclude=__pycache__ --exclude='*.egg-info' --exclude=build --exclude='*_pb2*' protos libs services kernels) |
		tar -x -C "$made"
	echo "building release $1 (if torch is needed, it is a large download)"
	"$python" -m venv "$release"
	# libs is listed without an extra too, so that pip finds it by name, as in --with 'bottega-libs[otel]'.
	packages=("$made/protos" "$made/libs" "$made/libs[client]" "$made/libs/serving" "$made/libs/weights"
		"$made/services[${services/#all/$all_services},sandbox]")
	[ "$kernels" = no ] || packages+=("$made/kernels")
	"$release/bin/python" -m pip install --quiet --disable-pip-version-check -c "$source_folder/constraints.txt" \
		"${packages[@]}" "${with[@]}" ||
		fail "pip could not install the release; nothing was changed"
	mkdir -p "$release/share"
	cp -R "$source_folder/deploy/systemd" "$source_folder/deploy/sysusers" "$source_folder/deploy/config" \
		"$source_folder/deploy/run" "$release/share/"
	choices >"$release/share/choices"
	"$release/bin/bottega" --version >/dev/null || fail "the release does not start; nothing was changed"
	touch "$release/.complete"
	trap - EXIT
	rm -rf "$made"
}

# Writes missing configurations. Existing files are never overwritten.
write_configurations() {
	local file
	while IFS= read -r file; do
		[ -e "$etc/$file" ] || install -D -m 644 "$1/share/config/$file" "$etc/$file"
	done < <(cd "$1/share/config" && find . -name '*.yaml' -printf '%P\n')
}

# An invalid configuration would keep its service from starting, so all are checked before the switch. Files of other
# services in that folder are skipped.
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
	# Ports are not checked: running services use theirs, and not every configuration is for this machine.
	BOTTEGA_CHECK_PORTS=no "$1/bin/bottega" config check "${ours[@]}" >/dev/null ||
		fail "this release cannot use the configurations named above: correct them and try again; nothing was changed"
}

# The pattern of the instances of a template unit, whose name ends in @.service.
instances_of() { echo "${1/%@.service/@*.service}"; }

stop_units() {
	offline && return
	local unit list
	list=$(systemctl list-units --full --plain --no-legend "$@" | awk '{ print $1 }')
	for unit in $list; do
		systemctl stop "$unit"
		# A failed unit would still be listed, and restarted, after its file is removed.
		systemctl reset-failed "$unit" 2>/dev/null || true
	done
}

# Removes the units that release $1 has and $2 has not. Other units in that folder are left alone.
remove_dropped_units() {
	local unit
	for unit in $(ls "$releases/$1/share/systemd"); do
		[ ! -e "$releases/$2/share/systemd/$unit" ] || continue
		[ -z "$restart" ] || stop_units "$(instances_of "$unit")"
		remove_unit "$unit"
	done
}

# Removes a unit and the links that enabled it and its instances.
remove_unit() {
	rm -f "$units/$1"
	find "$units" -mindepth 2 -type l -name "$(instances_of "$1")" -delete
}

# Removes the units of all releases.
remove_units() {
	local unit
	[ -d "$units" ] || return 0
	for unit in "$releases"/*/share/systemd/*; do
		[ -e "$unit" ] || continue
		remove_unit "$(basename "$unit")"
	done
	find "$units" -depth -type d -name '*bottega*' -empty -delete
}

# Runs before configurations are checked, because the check includes whether the units' groups may read the files named.
make_groups() {
	install -D -m 644 -t "$sysusers" "$1"/share/sysusers/*
	# Below --root, as in a container, all services may have one user, who needs no group for links or tenants.
	! has_sysusers || systemd-sysusers ${root:+--root="$root"} bottega.conf
}

write_units() {
	install -D -m 644 -t "$units" "$1"/share/systemd/*
	install -D -m 755 "$1/share/run" "$home/run"
	mkdir -p "$bin"
	ln -sfn "$home/current/bin/bottega" "$bin/bottega"
}

# Services that run, start, or have failed (the new release may fix that). The gateway comes last: its jobs are on its
# disk, and workers finish their current job before they end.
services_to_restart() {
	systemctl list-units --full --plain --no-legend --state=active,activating,reloading,failed 'bottega-*.service' |
		awk '$1 == "bottega-gateway.service" { gateway = $1; next } { print $1 } END { if (gateway) print gateway }'
}

# An upgrade stops at the first service that ran before and does not start again: those not restarted yet keep running
# in the old release. A rollback restarts all.
restart_services() {
	offline && return
	systemctl daemon-reload
	[ -n "$restart" ] || return 0
	local unit list ran failed= way_back=
	list=$(services_to_restart)
	for unit in $list; do
		echo "restarting $unit"
		systemctl is-active --quiet "$unit" && ran=yes || ran=
		# systemd refuses to start a unit that failed too often, unless its state is reset.
		systemctl reset-failed "$unit" 2>/dev/null || true
		systemctl restart "$unit" && continue
		failed="$failed $unit"
		echo "$unit does not start; see systemctl status $unit and journalctl -u $unit" >&2
		if [ "$command" = install ] && [ -n "$ran" ]; then break; fi
	done
	[ "$command" = rollback ] || way_back="; to go back: deploy/install.sh rollback"
	[ -z "$failed" ] || fail "release $(link_of current) is current, but these services do not start:$failed$way_back"
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
	echo "release $1 is current${from:+; the previous one was $from}"
}

# Lists the processes that were started from a release or have one of its files mapped, such as a library. The pattern is
# passed on stdin, so that grep does not find itself.
processes_of() {
	local path
	path=$(cd "$releases/$1" && pwd -P)/
	grep -lsF -f - /proc/[0-9]*/{cmdline,maps} <<<"$path" | cut -d/ -f3 | sort -nu | xargs || true
}

# A running service keeps importing modules and starting processes from its release, so that release must stay.
remove_old() {
	local release running
	for release in $(ls -1t "$releases" | tail -n "+$((keep + 1))"); do
		case $release in "$(link_of current)" | "$(link_of previous)") continue ;; esac
		running=$(processes_of "$release")
		if [ -n "$running" ]; then
			echo "release $release is kept: processes still run in it (${running// /, })"
			continue
		fi
		echo "removing release $release"
		rm -rf "${releases:?}/$release"
	done
}

# The lock is on the folder itself: a lock file could be a link, and opening it for writing would empty its target.
lock() {
	install -d -m 755 "$home" "$releases"
	exec 9<"$home"
	flock -n 9 || fail "another install.sh is running"
}

say_what_is_next() {
	if offline; then
		cat <<-TEXT
			systemd was not called. Start the services by hand, each in a terminal of its own (all of them: see "Without systemd"
			in deploy/README.md):
			  BOTTEGA_STATE=$state/bottega-gateway $home/run bottega.gateway --config $etc/gateway.yaml
			  BOTTEGA_STATE=$state/bottega-worker/miniature $home/run bottega.worker --config $etc/workers/miniature.yaml
			  $bin/bottega doctor
		TEXT
	else
		cat <<-'TEXT'
			Next steps on a machine with a gateway and a worker of the embedded model:
			  systemctl enable --now bottega.target bottega-gateway bottega-worker@miniature
			  bottega doctor
		TEXT
	fi
}

remains() { ls -d "$etc" "$state"/bottega-* "$state"/private/bottega-* 2>/dev/null || true; }

case $command in
install)
	has_sysusers || [ -n "$root" ] ||
		fail "systemd-sysusers is needed to create the group for links (Debian: apt install systemd); without systemd, use --root FOLDER" 2
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
	[ -n "$before" ] && [ -e "$releases/$before/.complete" ] || fail "there is no previous release"
	make_groups "$releases/$before"
	check_configurations "$releases/$before"
	switch_to "$before"
	;;
status)
	has_releases || fail "nothing is installed below ${root:-/}"
	for release in $(ls -1 "$releases"); do
		mark=
		[ "$release" = "$(link_of current)" ] && mark=" (current)"
		[ "$release" = "$(link_of previous)" ] && mark=" (previous)"
		[ -e "$releases/$release/.complete" ] || mark=" (incomplete)"
		echo "$release$mark"
	done
	read_choices
	choices
	echo "this checkout with these options is release $(release_name)"
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
		echo "configurations and state are kept (uninstall --purge removes them):" $(remains)
	fi
	offline || systemctl daemon-reload
	;;
esac
